DELETE FROM revisions WHERE letter IN_IDS

DELETE FROM contents WHERE letter IN_IDS

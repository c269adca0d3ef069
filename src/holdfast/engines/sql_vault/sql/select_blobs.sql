SELECT DISTINCT blob FROM contents WHERE letter IN_IDS AND blob <> ''

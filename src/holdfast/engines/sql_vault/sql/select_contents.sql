SELECT letter, body, properties, blob FROM contents WHERE letter IN_IDS

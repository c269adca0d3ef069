SELECT body, properties, blob FROM contents WHERE letter = :letter

UPDATE letters SET revision = :number, changed_at = :now WHERE id = :letter

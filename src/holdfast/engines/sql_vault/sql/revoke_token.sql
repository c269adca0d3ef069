UPDATE tokens SET revoked_at = :now WHERE name = :name AND revoked_at = 0 RETURNING name

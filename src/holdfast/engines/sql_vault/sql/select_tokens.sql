SELECT document, revoked_at FROM tokens ORDER BY name

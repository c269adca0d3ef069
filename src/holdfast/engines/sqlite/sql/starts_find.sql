SELECT number FROM starts WHERE queue = ? AND key = ? ORDER BY number

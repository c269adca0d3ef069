SELECT document FROM plans WHERE hash = :hash

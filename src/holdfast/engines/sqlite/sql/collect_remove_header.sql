UPDATE series SET count = NULL, series_count = NULL WHERE transaction_id = ?1 AND series = ?2

"""The collector: a large result arrives as numbered messages and is gathered exactly once, whatever crashes."""

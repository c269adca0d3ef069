SELECT version FROM holdfast.catalog

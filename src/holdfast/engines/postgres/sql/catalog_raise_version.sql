UPDATE holdfast.catalog SET version = version + 1

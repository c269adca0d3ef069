-- The dedupe key that a dead item had: the key is free again, and it still tells which redrive made the item.
ALTER TABLE holdfast.items ADD COLUMN former_key text;

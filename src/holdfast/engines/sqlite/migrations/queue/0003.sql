-- The id that an item had when it came into its queue; NULL while it has it still.
ALTER TABLE items ADD COLUMN first_id INTEGER;

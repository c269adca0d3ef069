-- The id that an item had when it came into its queue; NULL while it has it still.
ALTER TABLE holdfast.items ADD COLUMN first_id bigint;

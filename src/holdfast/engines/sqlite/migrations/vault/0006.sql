-- The ledger is looked through by who did what, when, and to which queue.
CREATE INDEX ledger_by_actor ON ledger (actor, number);
CREATE INDEX ledger_by_action ON ledger (action, number);
CREATE INDEX ledger_by_queue ON ledger (queue, number);
CREATE INDEX ledger_by_moment ON ledger (at, number);

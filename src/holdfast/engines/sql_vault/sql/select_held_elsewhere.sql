SELECT letter FROM redrive_letters WHERE letter IN_IDS AND redrive <> :redrive AND status IN ('leased', 'unknown')

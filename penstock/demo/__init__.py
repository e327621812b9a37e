"""`penstock demo`: devices, consumers and a reconciliation on one machine."""

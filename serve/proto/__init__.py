"""The wire format, the messages generated from it (`make proto`), and its services."""

"""What can be trained: one recipe a kind of drafter."""

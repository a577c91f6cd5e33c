"""What trainees learn from: texts, rows, packed batches, and the answers of the target itself."""

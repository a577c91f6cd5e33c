"""What trainees are trained towards: losses, the frozen target, simulated acceptance."""

"""What torch runs forward and backward for the ops of a stage, recorded on tensors without memory."""

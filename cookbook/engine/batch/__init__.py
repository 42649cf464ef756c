"""From the datums of a call to the tensors of its forward passes."""

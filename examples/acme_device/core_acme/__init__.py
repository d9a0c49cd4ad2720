"""The Acme A1 for `core`: a simulated accelerator that lives on CPU tensors and captures graphs by recording."""

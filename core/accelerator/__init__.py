"""The generic device: any accelerator that torch itself drives, by `torch.accelerator` and nothing of a vendor's."""

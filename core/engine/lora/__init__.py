"""LoRA adapters: several at once beside the linear layers of one model, loaded and removed while graphs stay."""

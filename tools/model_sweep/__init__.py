"""The sweep over transformers' encoder, vision, audio and seq2seq classes by `torch.compile(backend="core")`."""

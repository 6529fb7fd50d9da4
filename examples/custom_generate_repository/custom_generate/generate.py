"""`model.generate` by speculative decoding: what transformers runs for `custom_generate="<this repository>"`."""

from specdec_kernels import hf


def generate(model, **arguments):
    """`model.generate(**arguments)`, whose loop is `specdec_kernels.hf.generate`; `draft=` and the others go there."""
    return model.generate(**arguments, custom_generate=hf.generate)

"""Llama-like targets on a CUDA device: paged K/V, Triton kernels, steps under CUDA graphs.

`network` reads the weights of a Hugging Face model into fused form, or says that it is of another kind; such a model is served
by `TransformersTarget` on CUDA as on a CPU. `kernels`, `attention`, `drafting` and `truncation` hold the Triton kernels, `launch`
calls them, `blocks` and `pool` keep the K/V and `target` is the `Target`. `step` is the whole step of drafting, verifying and
accepting on the device, `sampling` its part in plain torch, and `decoder` what the host has to do with it. Only `loading` imports
this package, and only for a CUDA device: triton need not be installed elsewhere.
"""

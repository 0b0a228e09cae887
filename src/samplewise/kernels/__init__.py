"""Hot contractions in Triton, one file each, and in `reference` what each of them means.

Each file registers one op (`torch.ops.samplewise.*`), which eager code and compiled graphs call alike: on a CUDA device, or in
Triton's interpreter, it runs the kernel, elsewhere the reference. Nothing here is imported before it is needed.
"""

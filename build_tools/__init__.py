"""Build-time tools: TileLang kernels -> CUDA sources -> objects. Nothing here is installed."""

"""Build-time tools: TileLang kernels -> CUDA sources -> cubins and launchers. They are not installed."""

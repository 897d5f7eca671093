import os

from foretoken.cli import MATMULS_BY_CUBLASLT

# As the services do, before a benchmark loads torch.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", MATMULS_BY_CUBLASLT)

#!/usr/bin/env bash
# compute-sanitizer on our kernels, on a Hopper GPU with nvcc: bash bench/sanitize.sh > results/sanitizer.log
# Arguments: tools, by default all three. SETS="ops sampling": these test files alone. For each tool first a control kernel
# with a fault of each tool's kind, of which it must find its own; then tests, in which it must find nothing.
# It takes the compute-sanitizer in PATH. Version 2025.3.1, of CUDA 13.0, ends in an "Internal Sanitizer Error" at the
# first kernel of ours; 2026.4 does not: pip install nvidia-cuda-sanitizer-api
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/control.cu" <<'CUDA'
__global__ void _linear_kernel(int *out) {
    __shared__ int race;
    race = threadIdx.x;
    if (threadIdx.x % 32 < 16) __syncthreads();
    out[threadIdx.x] = race;
}
int main() {
    int *out;
    cudaMalloc(&out, 4);
    _linear_kernel<<<1, 64>>>(out);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
CUDA
nvcc -o "$folder/control" "$folder/control.cu"
declare -A tests=(
    [fp4_gemm]='forward_and_backward and (sizes3 or sizes4 or 16-sizes0 or 17-sizes0 or 33-sizes1 or 100-sizes0 or 128-sizes1 or 128-sizes2 or 129-sizes2 or 512-sizes2) or rows_from_the_middle'
    [ops]='gpu_attention and (positions1 or positions0-9) or gpu_norm_swiglu_and_rope or gpu_reads_embeddings'
    [logprobs]='gpu_equals_float64'
    [sampling]='gpu_samples_and_append')
sets=${SETS:-fp4_gemm ops logprobs sampling}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
echo "commit ${COMMIT:-$(git describe --always --dirty)}; $(compute-sanitizer --version | tail -n 1)"
for name in $sets; do
    python -m pytest -m gpu "tests/test_$name.py" -k "${tests[$name]}" > /dev/null     # compiles
done
for tool in ${*:-racecheck synccheck memcheck}; do
    first=() without=
    if [ $tool = memcheck ]; then
        first=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1)     # or a tensor ends inside a larger block
        without=' or gpu_reads_embeddings'     # it captures a graph, which needs the cache
    fi
    run=(compute-sanitizer --tool $tool --error-exitcode 9)
    for kernel in linear shrink dequantize attention add_norm swiglu rope embed softmax tile merge append; do
        run+=(--kernel-name "kns=_${kernel}_")
    done
    "${run[@]}" "$folder/control" > "$folder/found" || true
    grep -q 'SUMMARY: [1-9]' "$folder/found" || { echo "$tool missed the control's fault"; exit 1; }
    echo "$tool, control: $(tail -n 1 "$folder/found")"
    for name in $sets; do
        "${first[@]}" "${run[@]}" python -m pytest -m gpu "tests/test_$name.py" -k "${tests[$name]/$without/}" > "$folder/found" ||
            { grep "=====" "$folder/found"; exit 1; }
        echo "$tool, tests/test_$name.py: $(tail -n 2 "$folder/found" | tr '\n' ' ')"
    done
done

// V^T images of every page that holds a token, on their own. The fused forms are in regroup.cu and prepare.cu.
#include "pack_values.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) pack_values(const __grid_constant__ PackParams params) {
    __shared__ uint4 tile[IMAGE_BYTES / 16];
    wait_for_previous_kernel();
    release_next_kernel();
    pack_block(params, blockIdx.x, tile);
}

// V^T images on their own: of every page that holds a token, or of the selected ones. The fused forms are
// in regroup.cu and prepare.cu.
#include "pack_values.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) pack_values(const __grid_constant__ PackParams params) {
    __shared__ uint4 tile[IMAGE_BYTES / 16];
    wait_for_previous_kernel();
    release_next_kernel();
    pack_block(params, blockIdx.x, tile);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    pack_selected(const __grid_constant__ PackParams params, const __grid_constant__ Selection selection) {
    __shared__ uint4 tile[IMAGE_BYTES / 16];
    wait_for_previous_kernel();
    release_next_kernel();
    pack_selected_block(params, selection, blockIdx.x, tile);
}

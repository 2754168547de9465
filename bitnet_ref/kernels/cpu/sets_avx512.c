#define BITNET_REF_SETS AVX512
#include "kernels.h"

#define BITNET_REF_SETS AVX2
#include "kernels.h"

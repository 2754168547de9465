#define BITNET_REF_SETS PLAIN
#include "kernels.h"

// Enough of the Metal standard library to compile compute kernels for a CPU; every metal_* header leads here.
#pragma once
#include "msl/keywords.h"
//
#include "msl/convert.h"
#include "msl/entry.h"
#include "msl/limits.h"
#include "msl/math.h"
#include "msl/matrix.h"
#include "msl/packed.h"
#include "msl/simd.h"
#include "msl/sync.h"
//
#include "msl/names.h"

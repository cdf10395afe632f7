// Names that have to be macros; included last, so that the other headers are read without them.
#pragma once

// Constructor syntax float4(a, b, ...): a function-like macro leaves the bare type name alone.
#define char2(...) metal::msl_make<char2>(__VA_ARGS__)
#define char3(...) metal::msl_make<char3>(__VA_ARGS__)
#define char4(...) metal::msl_make<char4>(__VA_ARGS__)
#define uchar2(...) metal::msl_make<uchar2>(__VA_ARGS__)
#define uchar3(...) metal::msl_make<uchar3>(__VA_ARGS__)
#define uchar4(...) metal::msl_make<uchar4>(__VA_ARGS__)
#define short2(...) metal::msl_make<short2>(__VA_ARGS__)
#define short3(...) metal::msl_make<short3>(__VA_ARGS__)
#define short4(...) metal::msl_make<short4>(__VA_ARGS__)
#define ushort2(...) metal::msl_make<ushort2>(__VA_ARGS__)
#define ushort3(...) metal::msl_make<ushort3>(__VA_ARGS__)
#define ushort4(...) metal::msl_make<ushort4>(__VA_ARGS__)
#define int2(...) metal::msl_make<int2>(__VA_ARGS__)
#define int3(...) metal::msl_make<int3>(__VA_ARGS__)
#define int4(...) metal::msl_make<int4>(__VA_ARGS__)
#define uint2(...) metal::msl_make<uint2>(__VA_ARGS__)
#define uint3(...) metal::msl_make<uint3>(__VA_ARGS__)
#define uint4(...) metal::msl_make<uint4>(__VA_ARGS__)
#define long2(...) metal::msl_make<long2>(__VA_ARGS__)
#define ulong3(...) metal::msl_make<ulong3>(__VA_ARGS__)
#define ulong4(...) metal::msl_make<ulong4>(__VA_ARGS__)
#define ulong2(...) metal::msl_make<ulong2>(__VA_ARGS__)
#define half2(...) metal::msl_make<half2>(__VA_ARGS__)
#define half3(...) metal::msl_make<half3>(__VA_ARGS__)
#define half4(...) metal::msl_make<half4>(__VA_ARGS__)
#define bfloat2(...) metal::msl_make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) metal::msl_make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) metal::msl_make<bfloat4>(__VA_ARGS__)
#define float2(...) metal::msl_make<float2>(__VA_ARGS__)
#define float3(...) metal::msl_make<float3>(__VA_ARGS__)
#define float4(...) metal::msl_make<float4>(__VA_ARGS__)
#define static_cast metal::msl_static_cast
// Literals without a suffix are float in Metal (the compiler flag says so) and there is no double.
#define double MSL_ERROR_double_does_not_exist_in_Metal
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_E_F 2.71828182845904523536f
#define M_SQRT2_F 1.41421356237309504880f
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define HALF_MAX 65504.0h
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u

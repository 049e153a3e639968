#include "elementwise.cuh"

// As silu_integral.rs has it: with z = ln(1 + e^-|x|), a series in z².
struct SiluIntegral : Formula {
    template <class S> __device__ S value(S x) const {
        S z = math::log1p(math::exp(-math::abs(x))), square = z * z;
        S series = S(-1.9939295860721076e-14);
        series = series * square + S(8.921691020456453e-13);
        series = series * square + S(-4.0647616451442255e-11);
        series = series * square + S(1.0 / 526901760.0);
        series = series * square + S(-1.0 / 10886400.0);
        series = series * square + S(1.0 / 211680.0);
        series = series * square + S(-1.0 / 3600.0);
        series = series * square + S(1.0 / 36.0);
        S l = (series * z + S(0.25)) * square + z;
        if (x > S(0)) {
            const double pi = 3.14159265358979323846;
            return S(0.5) * x * x + S(-pi * pi / 6) + math::min(x, S(1e9)) * z + l;
        }
        return at_least(x, -1e9) * z - l;
    }
    template <class S> __device__ S apply(S dout, S x) const { return dout * (at_least(x, -1e9) * math::sigmoid(x)); }
};

#include "common.cuh"

struct AdamWStep {
    double lr, beta1, beta2, eps, weight_decay, correction1, correction2;
};

template <class T>
__global__ void adamw(AdamWStep step, T *__restrict__ param, const T *__restrict__ grad, T *__restrict__ m,
                      T *__restrict__ v, i64 count) {
    GRID_STRIDE(i, count) {
        T g = grad[i], p = param[i] * (T(1) - T(step.lr * step.weight_decay));
        T first = T(step.beta1) * m[i] + T(1 - step.beta1) * g;
        T second = T(step.beta2) * v[i] + T(1 - step.beta2) * g * g;
        m[i] = first;
        v[i] = second;
        T root = T(math::sqrt(step.correction2));
        param[i] = p - T(step.lr / step.correction1) * (first / (math::sqrt(second) / root + T(step.eps)));
    }
}

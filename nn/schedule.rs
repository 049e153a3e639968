//! Learning rates over the steps of a run.
//!
//! Sources: of the cosine Loshchilov and Hutter, SGDR, arXiv 1608.03983; of warm-up, stable, decay Hu et al., MiniCPM,
//! arXiv 2404.06395.

/// The shape of a schedule after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// The peak to the end.
    Constant,
    /// Half a cosine from the peak to the floor.
    Cosine,
    /// A straight line from the peak to the floor.
    Linear,
    /// Warm-up, stable, decay: the peak, then over the last `decay_steps` steps a straight line to the floor.
    Wsd {
        /// Length of the last part, in steps.
        decay_steps: u64,
    },
}

/// A learning rate for every step, counted from 0: `peak·(s+1)/warmup` while `s < warmup`, then the decay over the
/// steps that are left, and the floor from `total` on. Always finite, and positive from the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The highest rate, reached with the last step of the warm-up.
    pub peak: f64,
    /// The rate at which the decay ends.
    pub floor: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// What follows the warm-up.
    pub decay: Decay,
}

impl Schedule {
    /// Warm-up, then a cosine to a tenth of the peak: what the experiments use.
    pub fn cosine(peak: f64, warmup: u64, total: u64) -> Schedule {
        Schedule { peak, floor: 0.1 * peak, warmup, total, decay: Decay::Cosine }
    }

    /// The rate of step `step`.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        if self.decay == Decay::Constant {
            return self.peak;
        }
        if step >= self.total {
            return self.floor;
        }
        let start = match self.decay {
            Decay::Wsd { decay_steps } => self.total.saturating_sub(decay_steps).max(self.warmup),
            _ => self.warmup,
        };
        if step < start {
            return self.peak;
        }
        // `start <= step < total`, hence no division by zero.
        let done = (step - start) as f64 / (self.total - start) as f64;
        let left = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            _ => 1.0 - done,
        };
        self.floor + (self.peak - self.floor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECAYS: [Decay; 5] =
        [Decay::Constant, Decay::Cosine, Decay::Linear, Decay::Wsd { decay_steps: 4 }, Decay::Wsd { decay_steps: 400 }];

    #[test]
    fn case_31_rates_are_finite_positive_and_meet_their_marks() {
        for decay in DECAYS {
            for (warmup, total) in [(0, 10), (3, 10), (10, 10), (12, 10), (0, 1), (1, 1), (0, 0)] {
                let s = Schedule { peak: 2.0, floor: 0.2, warmup, total, decay };
                for step in 0..30 {
                    let rate = s.rate(step);
                    assert!(rate.is_finite() && rate > 0.0 && rate <= 2.0, "{s:?} step {step}: {rate}");
                }
                if warmup > 0 {
                    assert_eq!(s.rate(warmup - 1), 2.0, "{s:?}: the peak with the last step of the warm-up");
                }
                let end = if decay == Decay::Constant { 2.0 } else { 0.2 };
                assert_eq!((s.rate(total.max(warmup)), s.rate(total.max(warmup) + 1)), (end, end), "{s:?}");
            }
        }
        assert_eq!(Schedule::cosine(1.0, 0, 10).rate(0), 1.0);
        assert_eq!(Schedule::cosine(1.0, 2, 10).rate(0), 0.5);
    }

    #[test]
    fn decays_have_their_shapes() {
        let rate = |decay, step| Schedule { peak: 1.0, floor: 0.0, warmup: 0, total: 8, decay }.rate(step);
        assert!((rate(Decay::Cosine, 4) - 0.5).abs() < 1e-15);
        assert_eq!(rate(Decay::Linear, 6), 0.25);
        assert_eq!(rate(Decay::Wsd { decay_steps: 4 }, 4), 1.0);
        assert_eq!(rate(Decay::Wsd { decay_steps: 4 }, 7), 0.25);
    }
}

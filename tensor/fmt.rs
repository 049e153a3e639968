//! How a tensor looks in a debugger, a test failure or a log: shape, dtype and a short preview.

use std::fmt;

use crate::shape::Offsets;
use crate::tensor::Tensor;

/// Indices shown at either end of an axis that is longer than twice this.
const EDGE: usize = 3;

fn write_axis(t: &Tensor, f: &mut fmt::Formatter, depth: usize) -> fmt::Result {
    if t.rank() == 0 {
        let x = t.item();
        return if !t.dtype().is_float() {
            write!(f, "{x}")
        } else if x == 0.0 || (1e-3..1e5).contains(&x.abs()) || !x.is_finite() {
            write!(f, "{x:.4}")
        } else {
            write!(f, "{x:.3e}")
        };
    }
    let n = t.dim(0);
    f.write_str("[")?;
    for i in (0..n).filter(|&i| n <= 2 * EDGE || i < EDGE || i >= n - EDGE) {
        if i > 0 {
            if t.rank() > 1 { write!(f, ",\n{:width$}", "", width = depth + 1)? } else { f.write_str(", ")? }
        }
        if n > 2 * EDGE && i == n - EDGE {
            f.write_str("…, ")?;
        }
        write_axis(&t.select(0, i), f, depth + 1)?;
    }
    f.write_str("]")
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "Tensor {:?} {}", self.shape(), self.dtype())?;
        write_axis(&self.on_host(), f, 0)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.cuda().is_some() {
            // Reading them would wait for the device.
            return write!(f, "Tensor({:?}, {}, on {})", self.shape(), self.dtype(), self.device());
        }
        write!(f, "Tensor({:?}, {}, [", self.shape(), self.dtype())?;
        for (i, offset) in Offsets::new(self.shape(), self.strides(), self.offset()).take(2 * EDGE).enumerate() {
            let x = dispatch!(self.dtype(), E => crate::Element::to_f64(self.storage_slice::<E>()[offset]));
            write!(f, "{}{x}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str(if self.len() > 2 * EDGE { ", …])" } else { "])" })
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Tensor};

    #[test]
    fn previews_are_short_and_show_shape_and_dtype() {
        let x = Tensor::from_fn::<f32>(&[2, 100], |i| i as f32);
        assert_eq!(format!("{x:?}"), "Tensor([2, 100], f32, [0, 1, 2, 3, 4, 5, …])");
        assert_eq!(
            x.to_string(),
            "Tensor [2, 100] f32\n[[0.0000, 1.0000, 2.0000, …, 97.0000, 98.0000, 99.0000],\n [100.0000, 101.0000, 102.0000, …, 197.0000, 198.0000, 199.0000]]"
        );
        assert_eq!(Tensor::scalar(DType::F64, 1e-9).to_string(), "Tensor [] f64\n1.000e-9");
        assert_eq!(Tensor::zeros(DType::I64, &[0]).to_string(), "Tensor [0] i64\n[]");
        assert_eq!(format!("{:?}", Tensor::zeros(DType::BF16, &[3, 0])), "Tensor([3, 0], bf16, [])");
    }
}

//! [`Module`]: how a struct of layers lists its parameters by name.

use kumiki_autograd::Param;
use kumiki_tensor::{DType, Device, Error, Result, Tensor};

/// Something with parameters. The list is what optimisers, checkpoints and counts go by; a tied weight is one
/// parameter and appears once. [`crate::module!`] writes the implementation from the fields' names.
pub trait Module {
    /// Appends every parameter with its name, `path` first.
    fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a Param)>);

    /// As [`Module::visit`], to be changed.
    fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut Param)>);

    /// Every parameter with its name.
    fn params(&self) -> Vec<(String, &Param)> {
        let mut out = Vec::new();
        self.visit("", &mut out);
        out
    }

    /// Every parameter with its name, to be changed.
    fn params_mut(&mut self) -> Vec<(String, &mut Param)> {
        let mut out = Vec::new();
        self.visit_mut("", &mut out);
        out
    }

    /// The number of distinct trainable values.
    fn param_count(&self) -> usize {
        self.params().iter().map(|(_, p)| p.value().len()).sum()
    }

    /// Sets every parameter from `source`, by name, converted to the parameter's dtype and where it lies; all or nothing.
    ///
    /// # Errors
    /// Names the parameter that is missing or has another shape; or the device has not enough memory.
    fn load<'a>(&mut self, source: impl Fn(&str) -> Option<&'a Tensor>) -> Result<()>
    where
        Self: Sized,
    {
        let mut values = Vec::new();
        for (name, param) in self.params() {
            let value = source(&name).ok_or_else(|| Error::new(format!("there is no value for parameter `{name}`")))?;
            if value.shape() != param.shape() {
                let (expected, found) = (param.shape(), value.shape());
                return Err(Error::new(format!(
                    "parameter `{name}` has shape {expected:?}, the value given has {found:?}"
                )));
            }
            values.push(value.cast(param.dtype()).to(&param.value().device())?);
        }
        self.params_mut().into_iter().zip(values).for_each(|((_, param), value)| param.set(value));
        Ok(())
    }

    /// Moves every parameter to a device; all or nothing.
    ///
    /// # Errors
    /// When the device has not enough memory, or fails.
    fn to(&mut self, device: &Device) -> Result<()>
    where
        Self: Sized,
    {
        let values: Vec<Tensor> =
            self.params().iter().map(|(_, param)| param.value().to(device)).collect::<std::result::Result<_, _>>()?;
        self.params_mut().into_iter().zip(values).for_each(|((_, param), value)| param.set(value));
        Ok(())
    }

    /// Where the parameters lie; the CPU, without any.
    fn device(&self) -> Device {
        self.params().first().map_or(Device::Cpu, |(_, param)| param.value().device())
    }

    /// Converts every parameter to another float dtype.
    fn cast(&mut self, dtype: DType)
    where
        Self: Sized,
    {
        for (_, param) in self.params_mut() {
            *param.value_mut() = param.value().cast(dtype);
        }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

impl Module for Param {
    fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a Param)>) {
        out.push((path.to_owned(), self));
    }
    fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut Param)>) {
        out.push((path.to_owned(), self));
    }
}

impl<M: Module> Module for Vec<M> {
    fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a Param)>) {
        self.iter().enumerate().for_each(|(i, m)| m.visit(&join(path, &i.to_string()), out));
    }
    fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut Param)>) {
        self.iter_mut().enumerate().for_each(|(i, m)| m.visit_mut(&join(path, &i.to_string()), out));
    }
}

impl<M: Module> Module for Option<M> {
    fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a Param)>) {
        self.iter().for_each(|m| m.visit(path, out));
    }
    fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut Param)>) {
        self.iter_mut().for_each(|m| m.visit_mut(path, out));
    }
}

#[doc(hidden)]
pub fn child_path(path: &str, name: &str) -> String {
    join(path, name)
}

/// Implements [`Module`](crate::Module) for a struct from its fields that hold parameters, in this order.
///
/// A layer with a single weight (`transparent`) lends it its own name: `wq: Linear` in a block is `wq`, not `wq.weight`.
/// The parameters of a part written with two dots, `..attention`, are listed as if they were the struct's own. An enum
/// has those of what the variant holds: `module!(enum Half { Plain, Cem })`.
///
/// ```
/// use kumiki_autograd::Param;
/// use kumiki_nn::{Module, module};
/// use kumiki_tensor::{DType, Tensor};
///
/// struct Scale { weight: Param }
/// module!(transparent Scale { weight });
/// struct Pair { first: Scale, others: Vec<Scale> }
/// module!(Pair { first, others });
/// struct Model { pair: Pair, last: Scale }
/// module!(Model { ..pair, last });
///
/// let scale = || Scale { weight: Param::new(Tensor::ones(DType::F32, &[2])) };
/// let model = Model { pair: Pair { first: scale(), others: vec![scale(), scale()] }, last: scale() };
/// let names: Vec<String> = model.params().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["first", "others.0", "others.1", "last"]);
/// assert_eq!(model.param_count(), 8);
/// ```
#[macro_export]
macro_rules! module {
    (transparent $name:ty { $field:ident }) => {
        impl $crate::Module for $name {
            fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a $crate::Param)>) {
                $crate::Module::visit(&self.$field, path, out);
            }
            fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut $crate::Param)>) {
                $crate::Module::visit_mut(&mut self.$field, path, out);
            }
        }
    };
    (enum $name:ident { $($variant:ident),+ $(,)? }) => {
        impl $crate::Module for $name {
            fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a $crate::Param)>) {
                match self {
                    $($name::$variant(part) => $crate::Module::visit(part, path, out),)+
                }
            }
            fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut $crate::Param)>) {
                match self {
                    $($name::$variant(part) => $crate::Module::visit_mut(part, path, out),)+
                }
            }
        }
    };
    ($name:ty { $($(..$flat:ident)? $($field:ident)?),+ $(,)? }) => {
        impl $crate::Module for $name {
            fn visit<'a>(&'a self, path: &str, out: &mut Vec<(String, &'a $crate::Param)>) {
                $(
                    $($crate::Module::visit(&self.$flat, path, out);)?
                    $($crate::Module::visit(&self.$field, &$crate::child_path(path, stringify!($field)), out);)?
                )+
            }
            fn visit_mut<'a>(&'a mut self, path: &str, out: &mut Vec<(String, &'a mut $crate::Param)>) {
                $(
                    $($crate::Module::visit_mut(&mut self.$flat, path, out);)?
                    $($crate::Module::visit_mut(&mut self.$field, &$crate::child_path(path, stringify!($field)), out);)?
                )+
            }
        }
    };
}

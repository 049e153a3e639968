//! Reading and writing `.safetensors` files: named tensors and a map of text metadata.
//!
//! Nothing in a header is trusted: sizes, offsets and names are checked (by the `safetensors` crate) before anything
//! is allocated. Files are written under a temporary name, flushed to the disk and renamed: a crash in between leaves
//! the old file.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The contents of a file.
#[derive(Debug, Default)]
pub struct Contents {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// The metadata of the header.
    pub metadata: BTreeMap<String, String>,
}

impl Contents {
    /// The tensor of a name.
    ///
    /// # Errors
    /// Names the tensor that is missing and how many there are.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| {
            Error::new(format!("there is no tensor `{name}` among the {} tensors of the file", self.tensors.len()))
        })
    }
}

fn to_file_type(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::U32 => Dtype::U32,
    }
}

fn to_bytes(tensor: &Tensor) -> Vec<u8> {
    let rows = tensor.contiguous();
    match rows.dtype() {
        DType::F32 => rows.as_slice::<f32>().iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F64 => rows.as_slice::<f64>().iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::BF16 => rows.as_slice::<crate::bf16>().iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I64 => rows.as_slice::<i64>().iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::U32 => rows.as_slice::<u32>().iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn from_bytes<const N: usize, E: Element>(view: &TensorView, read: impl Fn([u8; N]) -> E) -> Tensor {
    let mut words = view.data().chunks_exact(N);
    Tensor::from_fn(view.shape(), |_| read(words.next().expect("sizes were checked").try_into().expect("N bytes")))
}

fn to_tensor(name: &str, view: &TensorView) -> Result<Tensor> {
    Ok(match view.dtype() {
        Dtype::F32 => from_bytes(view, f32::from_le_bytes),
        Dtype::F64 => from_bytes(view, f64::from_le_bytes),
        Dtype::BF16 => from_bytes(view, crate::bf16::from_le_bytes),
        Dtype::I64 => from_bytes(view, i64::from_le_bytes),
        Dtype::U32 => from_bytes(view, u32::from_le_bytes),
        other => {
            return Err(Error::new(format!("tensor `{name}` has type {other:?}; expected F32, F64, BF16, I64 or U32")));
        }
    })
}

/// Reads the contents of a file that is in memory.
///
/// # Errors
/// When the header is not valid, does not fit the data or names a type that tensors cannot have.
pub fn from_buffer(bytes: &[u8]) -> Result<Contents> {
    let not_valid = || Error::new(format!("these {} bytes are not a valid safetensors file", bytes.len()));
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| not_valid().because(e))?;
    let file = SafeTensors::deserialize(bytes).map_err(|e| not_valid().because(e))?;
    let mut out = Contents::default();
    for (name, view) in file.iter() {
        out.tensors.insert(name.to_owned(), to_tensor(name, &view)?);
    }
    out.metadata.extend(header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())));
    Ok(out)
}

/// Reads a file.
///
/// # Errors
/// When the file cannot be read or is not valid; the sentence names it.
pub fn load(path: &Path) -> Result<Contents> {
    let bytes = std::fs::read(path).map_err(|e| Error::new(format!("cannot read {}", path.display())).because(e))?;
    from_buffer(&bytes).map_err(|e| Error::new(format!("cannot load {}", path.display())).because(e))
}

/// Writes a file, whole or not at all.
///
/// # Errors
/// When the folder does not exist or cannot be written; the file that was there before stays as it was.
pub fn save<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let failed = |doing: &str| Error::new(format!("cannot {doing} {}", path.display()));
    let bytes: Vec<(&str, DType, Vec<usize>, Vec<u8>)> =
        tensors.into_iter().map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), to_bytes(t))).collect();
    let mut views = Vec::with_capacity(bytes.len());
    for (name, dtype, shape, data) in &bytes {
        let view =
            TensorView::new(to_file_type(*dtype), shape.clone(), data).map_err(|e| failed("write").because(e))?;
        views.push((*name, view));
    }
    let header: HashMap<String, String> = metadata.clone().into_iter().collect();
    let encoded = safetensors::serialize(views, Some(header)).map_err(|e| failed("write").because(e))?;

    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(&encoded)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(|e| {
        // What is left of the failed attempt helps nobody; that it cannot be removed changes nothing either.
        let _ = std::fs::remove_file(&temporary);
        failed(&format!("write {} bytes to", encoded.len())).because(e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_of_every_dtype_and_of_views() {
        let dir = std::env::temp_dir().join(format!("kumiki-safetensors-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("a.safetensors");
        let x = Tensor::from_fn::<f64>(&[2, 3], |i| i as f64 - 2.5);
        let all = [DType::F32, DType::F64, DType::BF16, DType::I64, DType::U32]
            .map(|d| (d.to_string(), x.transpose(0, 1).cast(d)));
        let metadata = BTreeMap::from([("kind".to_owned(), "test".to_owned())]);
        save(&path, all.iter().map(|(n, t)| (n.as_str(), t)), &metadata).unwrap();
        let back = load(&path).unwrap();
        assert_eq!(back.metadata, metadata);
        for (name, tensor) in &all {
            let read = back.get(name).unwrap();
            assert_eq!((read.dtype(), read.shape()), (tensor.dtype(), tensor.shape()));
            assert_eq!(read.to_f64_vec(), tensor.to_f64_vec());
        }
        assert!(back.get("absent").unwrap_err().to_string().contains("no tensor `absent` among the 5"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn damaged_files_are_refused_without_panic() {
        let file = |header: &str, data: usize| {
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.bytes());
            bytes.resize(bytes.len() + data, 0);
            bytes
        };
        let entry = |shape: &str, offsets: &str| {
            format!(r#"{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(from_buffer(&file(&entry("[1]", "[0,4]"), 4)).is_ok());
        for bad in [
            u64::MAX.to_le_bytes().to_vec(),
            vec![],
            file(&entry("[1]", "[]"), 4),
            file(&entry("[1]", "[8,4]"), 4),
            file(&entry("[1000,1000]", "[0,4]"), 4),
            file(&entry("[8589934592,8589934592]", "[0,4]"), 4),
            file(&entry("[1]", "[4,8]"), 8),
            file(&entry("[1]", "[0,4]"), 3),
        ] {
            let error = from_buffer(&bad).unwrap_err().to_string();
            assert!(error.contains("not a valid safetensors file: "), "{error}");
        }
    }
}

//! Reading and writing `.safetensors` files: named tensors and a map of text metadata.
//!
//! Nothing in a header is trusted: sizes, offsets and names are checked (by the `safetensors` crate) before anything
//! is allocated. Files are written as [`crate::files`] says: a crash in between leaves the old file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::files;
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

/// The name that a header, an object in JSON, has twice. The `safetensors` crate would take one of the two.
fn duplicate(header: &[u8]) -> serde_json::Result<Option<String>> {
    struct Names;
    impl<'de> Visitor<'de> for Names {
        type Value = Option<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Option<String>, A::Error> {
            let (mut seen, mut twice) = (BTreeSet::new(), None);
            while let Some((name, _)) = map.next_entry::<String, IgnoredAny>()? {
                if let Some(name) = seen.replace(name) {
                    twice.get_or_insert(name);
                }
            }
            Ok(twice)
        }
    }
    serde_json::Deserializer::from_slice(header).deserialize_map(Names)
}

/// Reads the contents of a file that is in memory.
///
/// # Errors
/// When the header is not valid, does not fit the data, has a name twice or names a type that tensors cannot have.
pub fn from_buffer(bytes: &[u8]) -> Result<Contents> {
    let not_valid = || Error::new(format!("these {} bytes are not a valid safetensors file", bytes.len()));
    let (length, header) = SafeTensors::read_metadata(bytes).map_err(|e| not_valid().because(e))?;
    if let Some(name) = duplicate(&bytes[8..8 + length]).map_err(|e| not_valid().because(e))? {
        return Err(not_valid().because(format!("its header names `{name}` twice")));
    }
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
    // A pipe would be waited for, a device read, for ever.
    if files::is_special(path) {
        return Err(Error::new(format!("`{}` is no regular file; expected tensors", path.display())));
    }
    let bytes = std::fs::read(path).map_err(|e| Error::new(format!("cannot read `{}`", path.display())).because(e))?;
    from_buffer(&bytes).map_err(|e| Error::new(format!("cannot load `{}`", path.display())).because(e))
}

/// The start of the file `encoded` with `metadata` put into its header, and the data that follow. The crate would write
/// the metadata in an order that differs from run to run; the same model must give the same bytes.
fn with_metadata<'a>(
    encoded: &'a [u8],
    metadata: &BTreeMap<String, String>,
) -> serde_json::Result<(Vec<u8>, &'a [u8])> {
    let length = u64::from_le_bytes(encoded[..8].try_into().expect("8 bytes")) as usize;
    let (tensors, data) = encoded[8..].split_at(length);
    let tensors = tensors[1..].trim_ascii_end();
    let comma = if tensors == b"}" { "" } else { "," };
    let mut header = format!("{{\"__metadata__\":{}{comma}", serde_json::to_string(metadata)?).into_bytes();
    header.extend(tensors);
    // The data start on a multiple of 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend(header);
    Ok((start, data))
}

/// Writes a file, whole or not at all. The same tensors and metadata give the same bytes.
///
/// # Errors
/// When the folder does not exist or cannot be written; the file that was there before stays as it was.
pub fn save<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let failed = |doing: &str| Error::new(format!("cannot {doing} `{}`", path.display()));
    let bytes: Vec<(&str, DType, Vec<usize>, Vec<u8>)> =
        tensors.into_iter().map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), to_bytes(t))).collect();
    let mut views = Vec::with_capacity(bytes.len());
    for (name, dtype, shape, data) in &bytes {
        let view =
            TensorView::new(to_file_type(*dtype), shape.clone(), data).map_err(|e| failed("write").because(e))?;
        views.push((*name, view));
    }
    let encoded = safetensors::serialize(views, None).map_err(|e| failed("write").because(e))?;
    let (start, data) = with_metadata(&encoded, metadata).map_err(|e| failed("write").because(e))?;

    files::replace(path, &[&start, data])
        .map_err(|e| failed(&format!("write {} bytes to", start.len() + data.len())).because(e))
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
    fn the_same_contents_give_the_same_bytes_with_keys_in_order() {
        let dir = std::env::temp_dir().join(format!("kumiki-safetensors-order-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("a.safetensors");
        let metadata: BTreeMap<String, String> = (0..9).map(|i| (format!("k{i}"), format!("\"{i}\u{1b}é"))).collect();
        let x = Tensor::from_slice(&[1f32, 2.0], &[2]);
        for tensors in [vec![], vec![("x", &x)]] {
            save(&path, tensors.clone(), &metadata).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let header = String::from_utf8_lossy(&bytes);
            let at: Vec<_> = metadata.keys().map(|key| header.find(&format!("\"{key}\"")).unwrap()).collect();
            assert!(at.is_sorted(), "{header}");
            let back = load(&path).unwrap();
            assert_eq!((back.metadata, back.tensors.len()), (metadata.clone(), tensors.len()));
        }
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
        let once = entry("[1]", "[0,4]");
        let twice = format!("{},{}", &once[..once.len() - 1], &once[1..]);
        let error = from_buffer(&file(&twice, 4)).unwrap_err().to_string();
        assert!(error.contains("its header names `x` twice"), "{error}");
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

//! Reading and writing `.safetensors` files: named tensors and a map of text metadata.
//!
//! Nothing in a header is trusted: sizes, offsets and names are checked before anything is allocated (`header.rs`). Files are written as [`crate::files`] says: a crash in between leaves the old file.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::files;
use crate::header;
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
/// When the header is not valid, does not fit the data, has a name twice or names a type that tensors cannot have.
pub fn from_buffer(bytes: &[u8]) -> Result<Contents> {
    let not_valid = || Error::new(format!("these {} bytes are not a valid safetensors file", bytes.len()));
    header::check(bytes).map_err(|e| not_valid().because(e))?;
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
    use std::collections::BTreeSet;

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
    fn case_38_a_header_is_not_trusted() {
        let file = |header: &str, data: usize| {
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.bytes());
            bytes.resize(bytes.len() + data, 0);
            bytes
        };
        let named = |name: &str, shape: &str, offsets: &str| {
            format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#)
        };
        let one = |shape: &str, offsets: &str| format!("{{{}}}", named("x", shape, offsets));
        let two = |a: &str, b: &str| format!("{{{},{}}}", named("x", "[1]", a), named("y", "[1]", b));
        assert_eq!(from_buffer(&file(&one("[1]", "[0,4]"), 4)).unwrap().tensors.len(), 1);
        assert_eq!(from_buffer(&file(&two("[0,4]", "[4,8]"), 8)).unwrap().tensors.len(), 2);
        let length = |n: u64| n.to_le_bytes().to_vec();
        let twice = format!("{{{0},{0}}}", named("x", "[1]", "[0,4]"));
        let mut seen = BTreeSet::new();
        for (bytes, says) in [
            (vec![], "the 8 bytes of its header's length are missing"),
            (length(u64::MAX), "said to have 18446744073709551615 bytes, of which there are 0"),
            (length(100), "said to have 100 bytes, of which there are 0"),
            (file("[]", 0), "its header cannot be read: invalid type: sequence, expected an object"),
            (file(&one("[1]", "[]"), 4), "tensor `x` has the data_offsets []; expected a first byte and an end"),
            (file(&one("[1]", "[8,4]"), 8), "tensor `x` ends at byte 4, before it starts at byte 8"),
            (file(&two("[0,4]", "[2,6]"), 6), "tensor `y` starts at byte 2, inside of `x`, which ends at byte 4"),
            (file(&one("[1]", "[4,8]"), 8), "bytes 0..4, before tensor `x`, are no tensor's"),
            (file(&two("[0,4]", "[8,12]"), 12), "bytes 4..8, before tensor `y`, are no tensor's"),
            (file(&twice, 4), "its header names `x` twice"),
            (file(&one("[1000,1000]", "[0,4]"), 4), "needs 4000000 bytes; its data_offsets have 4"),
            (file(&one("[8589934592,8589934592]", "[0,4]"), 4), "more bytes than can be counted"),
            (file(&one("[1]", "[0,4]"), 3), "its tensors need 4 bytes of data, of which there are 3"),
            (file(&one("[1]", "[0,4]"), 5), "its tensors need 4 bytes of data, of which there are 5"),
        ] {
            let error = from_buffer(&bytes).unwrap_err().to_string();
            assert!(error.contains("not a valid safetensors file: ") && error.contains(says), "{says}: {error}");
            assert!(seen.insert(error.clone()), "two faults have one sentence: {error}");
        }
    }
}

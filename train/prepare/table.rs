//! The column `text` of a Parquet file, a few rows at a time.

use std::fs::File;
use std::path::Path;

use parquet::basic::{Compression, Type};
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::file::reader::{FileReader, SerializedFileReader};

use crate::{Error, Result};

/// The column that has the documents.
const COLUMN: &str = "text";
/// Rows that are taken at once.
const ROWS: usize = 64;

pub(super) struct Table {
    file: SerializedFileReader<File>,
    path: String,
    column: usize,
    /// Whether a value may be missing.
    optional: bool,
    group: usize,
    reader: Option<ColumnReader>,
    rows: u64,
    total: u64,
}

/// Texts of some rows, `None` where one is missing, and the share of the file's rows that has been read.
pub(super) type Rows = (Vec<Option<ByteArray>>, f64);

/// Whether this program unpacks what is packed so, or what is wrong.
fn readable(packing: Compression) -> std::result::Result<(), String> {
    match packing {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) => Ok(()),
        Compression::LZ4 | Compression::LZ4_RAW | Compression::ZSTD(_) => Ok(()),
        other => {
            let name = format!("{other:?}");
            let name = name.split('(').next().unwrap_or_default();
            Err(format!(
                "has its column `{COLUMN}` packed as {name}, which this program does not unpack; expected ZSTD, SNAPPY, GZIP, \
                 LZ4 or nothing: write it anew with one of these"
            ))
        }
    }
}

impl Table {
    /// # Errors
    /// When the file is no table, or has no column `text` of texts: its columns are named.
    pub(super) fn open(path: &Path) -> Result<Table> {
        let file = File::open(path).map_err(|e| Error::io("read the table", path, e))?;
        let path = path.display().to_string();
        let wrong = |what: String| Error::new(format!("`{path}` {what}"));
        let file = SerializedFileReader::new(file).map_err(|e| wrong(format!("is no Parquet file: {e}")))?;
        let meta = file.metadata().file_metadata();
        let columns = meta.schema_descr().columns();
        let Some(column) = columns.iter().position(|column| column.path().string() == COLUMN) else {
            let names: Vec<String> = columns.iter().map(|column| format!("`{}`", column.path().string())).collect();
            return Err(wrong(format!("has no column `{COLUMN}`; its columns are {}", names.join(", "))));
        };
        let found = &columns[column];
        if found.physical_type() != Type::BYTE_ARRAY || found.max_rep_level() > 0 {
            let kind = found.physical_type();
            return Err(wrong(format!("has a column `{COLUMN}` of {kind}; expected one text in every row")));
        }
        // Before the first row is read, which may be long after the first row of another file.
        let packings = file.metadata().row_groups().iter().map(|group| group.column(column).compression());
        packings.into_iter().try_for_each(|packing| readable(packing).map_err(wrong))?;
        let (optional, total) = (found.max_def_level() > 0, meta.num_rows().max(0) as u64);
        Ok(Table { path, column, optional, group: 0, reader: None, rows: 0, total, file })
    }

    /// The next rows; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Rows>> {
        let wrong = |path: &str, e: &dyn std::fmt::Display| Error::new(format!("`{path}` cannot be read: {e}"));
        loop {
            let reader = match &mut self.reader {
                Some(reader) => reader,
                None if self.group == self.file.num_row_groups() => return Ok(None),
                none => {
                    let group = self.file.get_row_group(self.group).map_err(|e| wrong(&self.path, &e))?;
                    self.group += 1;
                    none.insert(group.get_column_reader(self.column).map_err(|e| wrong(&self.path, &e))?)
                }
            };
            let ColumnReader::ByteArrayColumnReader(reader) = reader else {
                return Err(wrong(&self.path, &"a row group has another type of column"));
            };
            let (mut values, mut present) = (Vec::with_capacity(ROWS), Vec::with_capacity(ROWS));
            let levels = self.optional.then_some(&mut present);
            let (rows, ..) = reader.read_records(ROWS, levels, None, &mut values).map_err(|e| wrong(&self.path, &e))?;
            if rows == 0 {
                self.reader = None;
                continue;
            }
            self.rows += rows as u64;
            let share = self.rows as f64 / self.total.max(1) as f64;
            let mut values = values.into_iter();
            let texts = match self.optional {
                // A level of 1: there is a value.
                true => present.iter().map(|&level| if level > 0 { values.next() } else { None }).collect(),
                false => values.map(Some).collect(),
            };
            return Ok(Some((texts, share)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_unpacked_is_named() {
        for packing in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::LZ4_RAW] {
            readable(packing).unwrap();
        }
        for (packing, name) in [(Compression::BROTLI(Default::default()), "BROTLI"), (Compression::LZO, "LZO")] {
            let what = readable(packing).unwrap_err();
            assert!(what.contains(&format!("packed as {name}, which this program does not unpack")), "{what}");
        }
    }
}

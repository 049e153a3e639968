//! A log as a table of comma-separated values, for spreadsheets and data frames.

use crate::log::Record;
use crate::{Error, Result};

const HEADER: [&str; 10] =
    ["corpus", "seed", "model", "step", "loss", "lr", "grad_norm", "tokens", "tok_s", "val_loss"];

/// A line with the names of the columns, then a line a record. Numbers have all their digits; what was no number is `NaN`,
/// what was not measured or not said is empty.
///
/// # Errors
/// When it cannot be written.
pub fn csv(records: &[Record]) -> Result<Vec<u8>> {
    let failed = |e: &dyn std::fmt::Display| Error::new(format!("cannot write the table: {e}"));
    let mut table = csv::Writer::from_writer(vec![]);
    table.write_record(HEADER).map_err(|e| failed(&e))?;
    for record in records {
        let Record { model, corpus, seed, step, loss, lr, grad_norm, tokens, tok_s, val_loss } = record.clone();
        let text = |value: Option<String>| value.unwrap_or_default();
        let row = [
            text(corpus),
            text(seed.map(|seed| seed.to_string())),
            text(model),
            step.to_string(),
            loss.to_string(),
            lr.to_string(),
            grad_norm.to_string(),
            tokens.to_string(),
            tok_s.to_string(),
            text(val_loss.map(|loss| loss.to_string())),
        ];
        table.write_record(row).map_err(|e| failed(&e))?;
    }
    table.into_inner().map_err(|e| failed(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_holds_what_the_log_holds() {
        let record = Record {
            model: Some("tango".into()),
            corpus: Some("a, \"b\"\n.txt".into()),
            seed: Some(u64::MAX),
            step: 1,
            loss: 0.1 + 0.2,
            lr: 1e-300,
            grad_norm: f64::NAN,
            tokens: u64::MAX,
            tok_s: 12_345.678,
            val_loss: None,
        };
        let bare = Record { model: None, corpus: None, seed: None, val_loss: Some(f64::NAN), ..record.clone() };
        let text = csv(&[record.clone(), bare]).unwrap();
        let mut table = csv::Reader::from_reader(&text[..]);
        assert_eq!(table.headers().unwrap().iter().collect::<Vec<_>>(), HEADER);
        let rows: Vec<csv::StringRecord> = table.records().map(|row| row.unwrap()).collect();
        assert_eq!((rows.len(), &rows[0][0], &rows[0][1]), (2, "a, \"b\"\n.txt", "18446744073709551615"));
        let number = |row: usize, column: usize| rows[row][column].parse::<f64>().unwrap();
        assert_eq!((number(0, 4), number(0, 5), number(0, 8)), (record.loss, record.lr, record.tok_s));
        assert!(number(0, 6).is_nan() && number(1, 9).is_nan());
        assert_eq!([&rows[0][9], &rows[1][0], &rows[1][1], &rows[1][2]], [""; 4]);
        assert_eq!(csv(&[]).unwrap(), (HEADER.join(",") + "\n").as_bytes());
    }
}

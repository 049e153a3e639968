//! A text that many are to be gone on from: read once by a double decoder's context stack, kept in a file, used by any number
//! of generations.
//!
//! What is kept are the context latents, `[1, T, D]`: the generation layers project them when a generation begins. A file
//! names the model that it was read by, through a fingerprint of its configuration and all of its parameters, and the text:
//! latents of another model, or damaged ones, would be used without anything looking wrong.

use std::collections::BTreeMap;
use std::path::Path;

use kumiki_models::DoubleDecoder;
use kumiki_nn::Module;
use kumiki_tensor::{Tensor, safetensors};

use crate::mix::{hash, mix};
use crate::sample::Request;
use crate::{Error, Result};

const FORMAT: &str = "kumiki prefix, version 1";

/// A text and what a model has read in it.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// The text, at least one token.
    pub tokens: Vec<i64>,
    /// `[1, T, D]`.
    pub latents: Tensor,
}

impl Prefix {
    /// Reads `tokens`.
    ///
    /// # Errors
    /// When there are none, or the model does not know one.
    pub fn read(model: &DoubleDecoder, tokens: &[i64]) -> Result<Prefix> {
        check_tokens(model, tokens).map_err(|why| Error::new(format!("the text cannot be read: {why}")))?;
        Ok(Prefix { tokens: tokens.to_vec(), latents: model.read(tokens) })
    }

    /// Whether a prefix can be put there: another one may be replaced, nothing else.
    ///
    /// # Errors
    /// When something else is there, or the folder is not.
    pub fn check_place(path: &Path) -> Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.display();
        if !folder.is_dir() {
            return Err(Error::new(format!("cannot write the prefix `{name}`: its folder does not exist")));
        }
        let is_prefix = || {
            let found = safetensors::load(path).ok().and_then(|contents| contents.metadata.get("format").cloned());
            found.is_some_and(|format| format == FORMAT)
        };
        if path.exists() && !(path.is_file() && is_prefix()) {
            return Err(Error::new(format!("`{name}` is there already and is no prefix; choose another place")));
        }
        Ok(())
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// As [`Prefix::check_place`], and when the file cannot be written.
    pub fn save(&self, path: &Path, model: &DoubleDecoder) -> Result<()> {
        Prefix::check_place(path)?;
        let ids = Tensor::from_slice(&self.tokens, &[self.tokens.len()]);
        let notes = [
            ("format", FORMAT.to_owned()),
            ("model", fingerprint(model)),
            ("contents", checksum(&[&ids, &self.latents])),
        ];
        let notes: BTreeMap<String, String> = notes.map(|(key, value)| (key.to_owned(), value)).into();
        safetensors::save(path, [("tokens", &ids), ("latents", &self.latents)], &notes)
            .map_err(|e| Error::new(e.to_string()))
    }

    /// Reads a file back for the model that it was made with.
    ///
    /// # Errors
    /// When there is no such file, it is damaged or no prefix, or another model made it.
    pub fn load(path: &Path, model: &DoubleDecoder) -> Result<Prefix> {
        let meta = std::fs::metadata(path).map_err(|e| Error::io("open the prefix", path, e))?;
        let failed = |why: String| Error::new(format!("cannot use the prefix `{}`: {why}", path.display()));
        // A pipe would be waited for, a device read, for ever.
        if !meta.is_file() {
            return Err(failed("it is no regular file".into()));
        }
        let contents = safetensors::load(path).map_err(|e| Error::new(e.to_string()))?;
        let note = |key: &str| contents.metadata.get(key).map_or("", String::as_str);
        if note("format") != FORMAT {
            let found = note("format");
            return Err(failed(format!(
                "its format is `{found}`; expected `{FORMAT}`, as `kumiki prefix save` writes it"
            )));
        }
        let (theirs, ours) = (note("model"), fingerprint(model));
        if theirs != ours {
            return Err(failed(format!("another model has made it ({theirs}; this one is {ours}); make it anew")));
        }
        let tensor = |name: &str| contents.get(name).map_err(|e| failed(e.to_string()));
        let (ids, latents) = (tensor("tokens")?, tensor("latents")?);
        if note("contents") != checksum(&[ids, latents]) {
            return Err(failed("it is damaged: text and latents are not what was written".into()));
        }
        let expected = [1, ids.len(), model.config.d_model];
        if ids.rank() != 1 || ids.dtype() != kumiki_tensor::DType::I64 || latents.shape() != expected {
            let (ids, latents) = (ids.shape(), latents.shape());
            return Err(failed(format!("latents must be {expected:?}, found {latents:?} for tokens {ids:?}")));
        }
        let tokens = ids.as_slice::<i64>().to_vec();
        check_tokens(model, &tokens).map_err(failed)?;
        Ok(Prefix { tokens, latents: latents.clone() })
    }

    /// As [`crate::sample::generate`], every prompt following the text as the beginning of a new block.
    ///
    /// # Errors
    /// As there.
    pub fn generate(
        &self,
        model: &DoubleDecoder,
        request: &Request,
        emit: impl FnMut(usize, i64) -> Result<bool>,
    ) -> Result<()> {
        request.check(self.tokens.len())?;
        let started = model.start_after(&self.tokens, &self.latents, &request.prompts, request.block_len);
        let (mut cache, logits) = started.map_err(|e| Error::new(e.to_string()))?;
        request.write(&self.tokens, logits, emit, |tokens| model.step(tokens, &mut cache))
    }
}

fn check_tokens(model: &DoubleDecoder, tokens: &[i64]) -> std::result::Result<(), String> {
    let ids = model.config.n_vocab as i64;
    if tokens.is_empty() {
        return Err("it is empty; at least one token is needed".into());
    }
    match tokens.iter().find(|id| !(0..ids).contains(*id)) {
        Some(wrong) => Err(format!("it holds token {wrong}; the model knows 0 to {}", ids - 1)),
        None => Ok(()),
    }
}

/// What a change of the model changes, its configuration or any parameter, in hexadecimal.
fn fingerprint(model: &DoubleDecoder) -> String {
    let config = serde_json::to_string(&model.config).expect("plain fields");
    let params = model.params().into_iter().map(|(name, p)| mix(hash(name.as_bytes()) ^ bits(p.value())));
    format!("{:016x}", params.fold(hash(config.as_bytes()), |h, p| mix(h ^ p)))
}

fn checksum(tensors: &[&Tensor]) -> String {
    format!("{:016x}", tensors.iter().fold(0, |h, x| mix(h ^ bits(x))))
}

/// A hash of dtype, shape and all elements.
fn bits(x: &Tensor) -> u64 {
    let start = hash(format!("{} {:?}", x.dtype(), x.shape()).as_bytes());
    x.to_f64_vec().iter().fold(start, |h, value| mix(h ^ value.to_bits()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Sampling;
    use crate::scratch::Scratch;
    use crate::settings::Settings;
    use crate::zoo::Suite;
    use kumiki_models::{Model, ModelConfig};
    use kumiki_tensor::{DType, Rng};

    fn model(seed: u64) -> DoubleDecoder {
        let config = Settings::for_suite(Suite::Double, "nano").unwrap().model("double", 256).unwrap();
        let ModelConfig::Double(config) = config else { panic!() };
        DoubleDecoder::new(&config, seed, DType::F32).unwrap()
    }

    fn request(prompts: &[Vec<i64>]) -> Request {
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        Request { prompts: prompts.to_vec(), count: 9, block_len: 4, sampling, rng: Rng::new(3) }
    }

    fn written(prefix: &Prefix, model: &DoubleDecoder, prompts: &[Vec<i64>]) -> Vec<Vec<i64>> {
        let mut texts = vec![vec![]; prompts.len()];
        let emit = |row: usize, id: i64| {
            texts[row].push(id);
            Ok(true)
        };
        prefix.generate(model, &request(prompts), emit).unwrap();
        texts
    }

    #[test]
    fn a_file_gives_what_reading_gives_and_rows_do_not_meet() {
        let (dir, model) = (Scratch::new(), model(1));
        let file = dir.path().join("prefix.safetensors");
        let fresh = Prefix::read(&model, &(0..37).collect::<Vec<i64>>()).unwrap();
        fresh.save(&file, &model).unwrap();
        let kept = Prefix::load(&file, &model).unwrap();
        assert_eq!((&kept.tokens, kept.latents.to_f64_vec()), (&fresh.tokens, fresh.latents.to_f64_vec()));
        let prompts = [vec![5], (60..69).collect(), vec![1, 2, 3]];
        let all = written(&fresh, &model, &prompts);
        assert_eq!(written(&kept, &model, &prompts), all);
        assert_eq!(written(&kept, &model, &prompts[..1])[0], all[0], "alone or beside others");
        // As if all had been one text whose first block ends with the prefix: as the first token of the prompt is read.
        let text = Model::Double(model.clone());
        let whole: Vec<i64> = fresh.tokens.iter().copied().chain([5]).collect();
        let mut alone = vec![];
        crate::sample::generate(&text, &request(&[whole]), |_, id| {
            alone.push(id);
            Ok(true)
        })
        .unwrap();
        assert_eq!(alone, all[0]);
    }

    #[test]
    fn what_another_model_made_or_is_damaged_is_refused() {
        let (dir, ours) = (Scratch::new(), model(1));
        let file = dir.path().join("prefix.safetensors");
        Prefix::read(&ours, &[1, 2, 3]).unwrap().save(&file, &ours).unwrap();
        let error = |model: &DoubleDecoder| Prefix::load(&file, model).unwrap_err().to_string();
        assert!(error(&model(2)).contains("another model has made it"), "{}", error(&model(2)));
        let mut trained = ours.clone();
        let change = Tensor::full(DType::F32, &[trained.config.d_model], 1e-7);
        trained.norm_out.params_mut()[0].1.value_mut().add_assign(&change);
        assert!(error(&trained).contains("another model has made it"));
        let good = std::fs::read(&file).unwrap();
        for at in [good.len() - 3, good.len() / 2] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&file, &bad).unwrap();
            assert!(error(&ours).contains("it is damaged"), "{}", error(&ours));
        }
        for (contents, phrase) in [(&good[..good.len() - 8], "prefix.safetensors"), (&[][..], "prefix.safetensors")] {
            std::fs::write(&file, contents).unwrap();
            assert!(error(&ours).contains(phrase), "{}", error(&ours));
        }
        std::fs::remove_file(&file).unwrap();
        assert!(error(&ours).contains("cannot open the prefix"));
        let (text, absent) = (dir.file("text", "a text"), dir.path().join("absent/prefix"));
        for (place, phrase) in [(&text, "is no prefix; choose another place"), (&absent, "its folder does not exist")] {
            let error = Prefix::read(&ours, &[1]).unwrap().save(place, &ours).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        assert_eq!(std::fs::read(&text).unwrap(), b"a text");
        crate::checkpoint::save(dir.path(), &Model::Double(ours.clone()), &BTreeMap::new()).unwrap();
        let error = Prefix::load(&dir.path().join("model.safetensors"), &ours).unwrap_err().to_string();
        assert!(error.contains("expected `kumiki prefix, version 1`"), "{error}");
        assert!(Prefix::read(&ours, &[]).unwrap_err().to_string().contains("it is empty"));
        assert!(
            Prefix::read(&ours, &[1, 256]).unwrap_err().to_string().contains("token 256; the model knows 0 to 255")
        );
    }
}

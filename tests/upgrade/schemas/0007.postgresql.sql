CREATE TABLE ledger (
	hour TIMESTAMP WITH TIME ZONE NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	seconds DOUBLE PRECISION NOT NULL,
	saved DOUBLE PRECISION,
	lost DOUBLE PRECISION,
	bytes BIGINT,
	transferred BIGINT,
	money DOUBLE PRECISION,
	holdout JSON,
	measured DOUBLE PRECISION,
	measured_low DOUBLE PRECISION,
	measured_high DOUBLE PRECISION,
	CONSTRAINT ledger_pkey PRIMARY KEY (hour, store, namespace, tier)
);
INSERT INTO alembic_version VALUES ('0007');

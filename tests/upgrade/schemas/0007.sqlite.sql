CREATE TABLE ledger (
	hour DATETIME NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	seconds DOUBLE NOT NULL,
	saved DOUBLE,
	lost DOUBLE,
	bytes BIGINT,
	transferred BIGINT,
	money DOUBLE,
	holdout JSON,
	measured DOUBLE,
	measured_low DOUBLE,
	measured_high DOUBLE,
	PRIMARY KEY (hour, store, namespace, tier)
);
INSERT INTO alembic_version VALUES ('0007');
